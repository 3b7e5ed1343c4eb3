"""Steps of the public calls: doors, planner, expected gradients, the loss, kept sets, results."""
