/* Kernels that are wrong on purpose: see broken.cu. */
#ifndef FSDP_BROKEN_H
#define FSDP_BROKEN_H

#ifdef __cplusplus
extern "C" {
#endif

enum {
    BROKEN_BARRIER,            /* half of the threads do not reach it */
    BROKEN_TWO_BARRIERS,       /* each half reaches another one */
    BROKEN_ABSENT_LANES,       /* half of the lanes of a shuffle do not come */
    BROKEN_MASK,               /* a lane outside of the mask is read */
    BROKEN_NOTHING             /* a vote; writes 1 for each of 64 threads */
};

int fsdp_broken_launch(int kind, int *sums_out);

#ifdef __cplusplus
}
#endif
#endif
