"""The commands of ``lightning-hybrid``, one module each, which parse options and print results.

Other modules do the work. Only the module of the called command is imported. It imports torch and Lightning after it
has parsed its options.
"""
