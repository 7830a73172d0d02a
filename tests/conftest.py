"""Owns what every test of ringfence gets; the fixtures themselves live beside what they serve."""

pytest_plugins = [
    "tests.requirements",
    "tests.rig.docker.fixtures",
    "tests.rig.fixtures",
    "tests.rig.k8s.fixtures",
    "tests.workers",
]
