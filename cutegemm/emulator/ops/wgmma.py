"""stub"""
def prepare(t, k): pass
