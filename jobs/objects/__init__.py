"""The object store: inputs and results as bytes under keys, behind one interface for a folder, S3, GCS and Azure."""

from jobs.objects.away import ObjectMissing
from jobs.objects.opening import memory_objects, open_objects
from jobs.objects.store import ObjectInfo, Objects
from jobs.objects.writer import Writer

__all__ = ["ObjectInfo", "ObjectMissing", "Objects", "Writer", "memory_objects", "open_objects"]
