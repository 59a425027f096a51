"""The tool gateway: paced, batched, paid requests to providers, each under a receipt."""
