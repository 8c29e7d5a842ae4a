"""Asking for labels that are randomised before they are stored: labellers, and the labelling page with its server."""
