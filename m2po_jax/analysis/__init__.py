"""From run directories to data frames, figures, tables, the HTML report and `inspect`."""
