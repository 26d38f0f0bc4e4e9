"""How flash_ext is built: the hooks, what a build needs and where it is, the compile graph, the gates."""
