"""The main job, end to end, with every part real."""
