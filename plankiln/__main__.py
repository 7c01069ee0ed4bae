"""`python -m plankiln` is `plankiln`."""

from plankiln.cli import main

if __name__ == "__main__":
    main()
