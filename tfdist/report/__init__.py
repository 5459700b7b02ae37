"""Report of a run as one HTML file, and the live table of tasks. Reads files only."""
