"""Lee and Kifer 2018, reproduced. Not here: methods and recipes, which the package ships."""
