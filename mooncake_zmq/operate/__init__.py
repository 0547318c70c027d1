"""The operator's commands: start a deployment, look at it, examine a machine, make keys."""
