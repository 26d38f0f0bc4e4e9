"""The parts of :mod:`flash_ext.masks`."""
