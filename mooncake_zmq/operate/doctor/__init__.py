"""Checks whether this machine is fit for its nodes of a deployment, and advises what to change. There is a module for each
area; none changes anything."""
