"""The page of what goes beyond schedules: correlated noise, batches and clip bounds at equal budgets."""
