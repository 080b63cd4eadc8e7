"""Hosts: other libraries' loops, with waterflow training what they train. Public API only."""
