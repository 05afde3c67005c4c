/*
 * A scenario's rank: a model whose layers are kernels of the device, and notes of what the rank sees, which
 * are compared with those of device cpu. gpu_scenarios.c runs all scenarios; gpu_wide.c has those of single
 * gathers and reductions.
 */
#ifndef FSDP_GPU_SCENE_H
#define FSDP_GPU_SCENE_H

#include "tests/support/nets/toy.h"

typedef struct gpu_scene {
    toy toy;                   /* first: bodies of layers get it */
    world_rank *rank;
    fsdp_text *notes;          /* a line per event list and tensor */
    size_t bytes;              /* of what makes a stream late */
    int step;
} gpu_scene;

typedef fsdp_status (*gpu_scene_body)(gpu_scene *scene, fsdp_error *err);

/* Settings of a net of layers "L0", "L1", ..., each a unit with one weight. */
typedef struct gpu_scene_net {
    int layers;
    int rows, columns;         /* of the mesh, which replicates over rows; 0: one dim */
    bool has_own;              /* a parameter of the root's own */
    bool is_sgd;
    fsdp_unit_opts units;      /* without mesh */
} gpu_scene_net;

/* Makes the net with values and an optimizer, in place of the one before. */
fsdp_status gpu_scene_build(gpu_scene *scene, const gpu_scene_net *net, fsdp_error *err);
/* Only the mesh and a model without parameters; the caller adds units and a root. */
fsdp_status gpu_scene_begin(gpu_scene *scene, const gpu_scene_net *net, fsdp_error *err);
fsdp_stream *gpu_scene_compute(const gpu_scene *scene);

/* The layer's computation: the gradient is the parameter times a number of rank, step and layer. */
fsdp_status gpu_scene_give_grad(toy *net, int layer, fsdp_error *err);
/* Forward, backward and step, with notes of all. */
fsdp_status gpu_scene_step(gpu_scene *scene, fsdp_error *err);
fsdp_status gpu_scene_train(gpu_scene *scene, int steps, fsdp_error *err);

/* --- the device's memory ------------------------------------------------------------------------ */

/* Copies of numbers, in the order of the compute stream; the host waits. `host` is the caller's. */
fsdp_status gpu_scene_read(gpu_scene *scene, const void *data, size_t size, void *host, fsdp_error *err);
/* Sets a gradient of this backward; the host's numbers may change then. */
fsdp_status gpu_scene_write_grad(gpu_scene *scene, fsdp_param *param, const void *host, size_t size,
                                 fsdp_error *err);

/* --- notes -------------------------------------------------------------------------------------- */

void gpu_scene_note_events(gpu_scene *scene);
fsdp_status gpu_scene_note_bytes(gpu_scene *scene, const char *what, const char *name, const void *data,
                                 size_t size, fsdp_error *err);
/* All shards, and their gradients. */
fsdp_status gpu_scene_note_tensors(gpu_scene *scene, fsdp_error *err);

/* --- gpu_wide.c: C1 to C5, C17, C20 ------------------------------------------------------------- */

fsdp_status gpu_scene_gathers(gpu_scene *scene, fsdp_error *err);
fsdp_status gpu_scene_gathers_of_slices(gpu_scene *scene, fsdp_error *err);
fsdp_status gpu_scene_reductions(gpu_scene *scene, fsdp_error *err);
fsdp_status gpu_scene_narrow_reductions(gpu_scene *scene, fsdp_error *err);
fsdp_status gpu_scene_packing(gpu_scene *scene, fsdp_error *err);
fsdp_status gpu_scene_alone(gpu_scene *scene, fsdp_error *err);
fsdp_status gpu_scene_early_gathers(gpu_scene *scene, fsdp_error *err);

#endif
