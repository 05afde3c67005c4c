/*
 * Fibers by a switch of the stack pointer and the registers that a call keeps; on processors without one
 * here, by ucontext, which asks the kernel at each switch. See fiber.h.
 */
#include "tests/cuda/fiber.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

enum { STACK = 256 << 10, GUARD = 4096 };

#if defined(__x86_64__)
typedef void *place; /* the stack pointer, below the saved registers */
#else
typedef ucontext_t place;
#endif

struct fsdp_fiber {
    void (*body)(void *context);
    void *context;
    place inside, outside;
    char *stack;
    const void *outer_stack; /* of the caller, for AddressSanitizer */
    size_t outer_size;
    void *inner_fake, *outer_fake;
};

/* --- what AddressSanitizer has to know -------------------------------------------------------- */

static void leave_stack(void **fake_out, const void *stack, size_t size)
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(fake_out, stack, size);
#else
    (void)fake_out, (void)stack, (void)size;
#endif
}

static void arrive(void *fake, const void **stack_out, size_t *size_out)
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, stack_out, size_out);
#else
    (void)fake, (void)stack_out, (void)size_out;
#endif
}

/* --- switches --------------------------------------------------------------------------------- */

static void run(fsdp_fiber *fiber)
{
    arrive(NULL, &fiber->outer_stack, &fiber->outer_size);
    fiber->body(fiber->context);
    abort();
}

#if defined(__x86_64__)
void fsdp_fiber_swap(place *save, place to);
void fsdp_fiber_begin(void);
/* A new stack has the fiber in the place of rbx, and fsdp_fiber_begin as the address to return to. */
__asm__(".text\n"
        ".hidden fsdp_fiber_swap\n"
        ".globl fsdp_fiber_swap\n"
        ".type fsdp_fiber_swap, @function\n"
        "fsdp_fiber_swap:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size fsdp_fiber_swap, . - fsdp_fiber_swap\n"
        ".hidden fsdp_fiber_begin\n"
        ".globl fsdp_fiber_begin\n"
        ".type fsdp_fiber_begin, @function\n"
        "fsdp_fiber_begin:\n"
        "    movq %rbx, %rdi\n"
        "    callq *%r12\n"
        "    ud2\n"
        ".size fsdp_fiber_begin, . - fsdp_fiber_begin\n");

enum { RBX = 4, R12 = 3, RETURN = 6, SAVED = 7 };

static void prepare(fsdp_fiber *fiber)
{
    uintptr_t top = (uintptr_t)fiber->stack + GUARD + STACK;
    uintptr_t *saved =
        (uintptr_t *)(top - 16) - SAVED; /* a call keeps the stack at a multiple of 16 */
    for (int i = 0; i < SAVED; i++)
        saved[i] = 0;
    saved[RBX] = (uintptr_t)fiber;
    saved[R12] = (uintptr_t)run;
    saved[RETURN] = (uintptr_t)fsdp_fiber_begin;
    fiber->inside = saved;
}

static void go(place *from, const place *to)
{
    fsdp_fiber_swap(from, *to);
}
#else
static void run_halves(unsigned high, unsigned low)
{
    run((fsdp_fiber *)((uintptr_t)high << 16 << 16 | low));
}

static void prepare(fsdp_fiber *fiber)
{
    uintptr_t address = (uintptr_t)fiber;
    getcontext(&fiber->inside);
    fiber->inside.uc_stack.ss_sp = fiber->stack + GUARD;
    fiber->inside.uc_stack.ss_size = STACK;
    fiber->inside.uc_link = NULL;
    makecontext(&fiber->inside, (void (*)(void))run_halves, 2, (unsigned)(address >> 16 >> 16),
                (unsigned)address);
}

static void go(place *from, const place *to)
{
    swapcontext(from, to);
}
#endif

fsdp_fiber *fsdp_fiber_create(void (*body)(void *context), void *context)
{
    fsdp_fiber *fiber = calloc(1, sizeof *fiber);
    if (!fiber)
        abort();
    fiber->body = body;
    fiber->context = context;
    fiber->stack = mmap(NULL, GUARD + STACK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fiber->stack == MAP_FAILED || mprotect(fiber->stack, GUARD, PROT_NONE) != 0)
        abort();
    prepare(fiber);
    return fiber;
}

void fsdp_fiber_free(fsdp_fiber *fiber)
{
    if (!fiber)
        return;
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(fiber->stack + GUARD, STACK); /* the next mapping may lie here */
#endif
    munmap(fiber->stack, GUARD + STACK);
    free(fiber);
}

void fsdp_fiber_enter(fsdp_fiber *fiber)
{
    leave_stack(&fiber->outer_fake, fiber->stack + GUARD, STACK);
    go(&fiber->outside, &fiber->inside);
    arrive(fiber->outer_fake, NULL, NULL);
}

void fsdp_fiber_leave(fsdp_fiber *fiber)
{
    leave_stack(&fiber->inner_fake, fiber->outer_stack, fiber->outer_size);
    go(&fiber->inside, &fiber->outside);
    arrive(fiber->inner_fake, &fiber->outer_stack, &fiber->outer_size);
}
