"""Pipeline stages for any model: layers are divided over the stages, and each stage runs the code around its layers."""
