"""The tests; a package, so that no other package of that name (verl installs one) takes its
place."""
