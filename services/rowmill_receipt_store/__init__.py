"""The receipt-store: receipts of paid work, charges and budgets of runs, leases of shards (schema `receipts`)."""
