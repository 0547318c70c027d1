"""Is this machine fit for its nodes of a deployment, and what is to be changed? A module for each area; none changes it."""
