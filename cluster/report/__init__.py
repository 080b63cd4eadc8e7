"""What a simulation found, for people: tables, pictures, a page."""
