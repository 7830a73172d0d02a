"""`make demo`: the main job on a temporary host whose internet is the rig's."""
