"""`python -m m2po_jax`: the same as the `m2po` command."""

from m2po_jax.cli import main

if __name__ == "__main__":
    main()
