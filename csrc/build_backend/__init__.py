"""How flash_ext is built: PEP 517 hooks, what a build needs and where it is found, the compile graph, the gates."""
