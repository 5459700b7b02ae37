"""Report of runs and sweeps as one HTML file. Only reads files."""
