"""Results for people: plain data, progress, figures, one HTML page."""
