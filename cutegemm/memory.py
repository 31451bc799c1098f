"""What the library keeps in GPU memory between calls, and how to give it back."""

from __future__ import annotations


def clear_workspaces() -> int:
    """Frees the workspaces that split-K and stream-K launches keep, of every stream, thread and device.

    A launch that adds up parts of K needs a workspace; a stream's workspace is kept for its later launches, a few MiB
    as a rule and 128 MiB at most. A captured CUDA graph keeps a workspace of its own as long as it or anything made of
    it lives; the workspaces of graphs that are gone are freed here, or by the next capture. This may be called at any
    time: launches under way and live graphs keep their memory, and the next launch that needs a workspace allocates
    one.

    Returns:
        How many bytes went back to torch's caching allocator; `torch.cuda.empty_cache()` gives them back to the GPU.
    """
    from cutegemm.cute import workspace  # imported late: importing cutegemm is cheap

    return workspace.default.free()
