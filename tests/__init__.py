"""The tests; a package, so that no other one of that name (verl installs one) takes its place."""
