"""What a step would take with each method: a cost model, what feeds it, and a verdict."""
