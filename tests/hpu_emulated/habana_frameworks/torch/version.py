__version__ = "1.22.0"
