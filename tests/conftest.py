"""What holds for every test."""

import signal

from piper import errors

# A shell starts background jobs with Ctrl-C ignored, and every process that a test starts would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where in piper a test fails is what is asked then.
errors.show_internals()
