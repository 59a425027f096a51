"""Looking whether all is well: with servers, services and queues (`health`), and with one run's books (`auditing`). Reads, and changes nothing."""
