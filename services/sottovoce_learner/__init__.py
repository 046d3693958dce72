"""The learner service: one learner of the graph, its neighbours, its owner's data, and its books."""
