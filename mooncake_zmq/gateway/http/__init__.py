"""HTTP in front of the gateway's actor: connections, keys, routes, streams."""
