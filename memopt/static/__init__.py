"""What the engine `static` is made of: recipes of operators, forms that write in place, the code of one call."""
