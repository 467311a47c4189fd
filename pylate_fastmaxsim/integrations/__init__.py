"""Where the operators meet the libraries that train retrievers: but for recipes/ the only modules that import one."""
