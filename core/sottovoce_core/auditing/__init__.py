"""The empirical audit: does what a learner says keep the privacy that was promised for it?"""
