"""In-context learning seen through components: does a context teach, or does it only re-weight what is there?"""
