"""Other libraries' loops as jobs: a module each, which imports its library when it is used."""
