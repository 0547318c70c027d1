"""Shows a running cluster in a terminal on any host; all information comes from its gateways."""
