/* A library that tells NCCL's version and has none of its other functions. */
int ncclGetVersion(int *version);

__attribute__((visibility("default"))) int ncclGetVersion(int *version)
{
    *version = 22809;
    return 0;
}
