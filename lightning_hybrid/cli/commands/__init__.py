"""The commands of ``lightning-hybrid``, a file each: options and what is printed; the work is done elsewhere.

Only the command that is called is imported, and it imports torch and Lightning when its options have been understood.
"""
