"""What an operator sees of a running cluster from a terminal, on whatever host: all of it comes from its gateways."""
