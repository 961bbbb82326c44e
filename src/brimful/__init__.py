"""Fill your GPU to the brim, never over it."""
