"""One call as a user makes it: results, arguments, autograd, compilation."""
