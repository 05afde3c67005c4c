/* kernels/cuda/box.cu, run by the host, against fsdp_copy_box: every byte agrees. */
#include "tests/unit/kernels/cuda/cuda_cases.h"

#include <criterion/criterion.h>
#include <string.h>

enum { MOST_BOXES = 5, MOST_NDIM = 9, MOST_BYTES = 60000 };

typedef struct box_case {
    int64_t len[MOST_NDIM], to_strides[MOST_NDIM], from_strides[MOST_NDIM];
    case_buffer to, expected, from;
} box_case;

/* Strides of dims in a random order, with gaps by chance; returns the bytes from the first to the last. */
static size_t lay_out(const int64_t *len, int ndim, size_t element, int64_t *strides)
{
    int order[MOST_NDIM];
    size_t span = element;
    bool keeps_order = case_below(2) == 0;
    for (int i = 0; i < ndim; i++) {
        int other = keeps_order ? i : (int)case_below((size_t)i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    for (int i = ndim - 1; i >= 0; i--) {
        if (case_below(4) == 0)
            span += element * case_below(3);
        strides[order[i]] = (int64_t)span;
        span *= (size_t)len[order[i]];
    }
    return span;
}

static fsdp_strided_copy create_case(box_case *one)
{
    static const size_t sizes[] = {1, 2, 4, 8, 16, 3, 12};
    size_t element = sizes[case_below(7)];
    int ndim = (int)case_below(MOST_NDIM + 1);
    size_t bytes = element;
    for (int dim = 0; dim < ndim; dim++) {
        one->len[dim] = (int64_t)case_below(case_below(4) == 0 ? 300 : 6) + (case_below(30) > 0);
        while (bytes * (size_t)one->len[dim] > MOST_BYTES)
            one->len[dim] /= 2;
        bytes *= one->len[dim] > 0 ? (size_t)one->len[dim] : 1;
    }
    size_t to = lay_out(one->len, ndim, element, one->to_strides);
    size_t from = lay_out(one->len, ndim, element, one->from_strides);
    size_t align = (element & (element - 1)) == 0 && case_below(3) > 0 ? element : 1;
    one->to = case_buffer_create(to, align);
    one->expected = case_buffer_copy(&one->to);
    one->from = case_buffer_create(from, align);
    case_fill(one->from.data, FSDP_U8, from);
    return (fsdp_strided_copy){.to = one->to.data,
                               .to_strides = one->to_strides,
                               .from = one->from.data,
                               .from_strides = one->from_strides,
                               .ndim = ndim,
                               .len = one->len,
                               .element_size = element};
}

Test(cuda_kernels_box, boxes_are_copied_as_by_c)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        box_case cases[MOST_BOXES];
        fsdp_strided_copy copies[MOST_BOXES];
        case_seed(seed);
        size_t n = case_below(MOST_BOXES + 1);
        for (size_t i = 0; i < n; i++)
            copies[i] = create_case(&cases[i]);
        case_expect_success(fsdp_cuda_copy_box(copies, n, NULL));
        for (size_t i = 0; i < n; i++) {
            copies[i].to = cases[i].expected.data;
            fsdp_copy_box(&copies[i]);
            case_expect_equal(&cases[i].to, &cases[i].expected, "box");
            case_buffer_free(&cases[i].to);
            case_buffer_free(&cases[i].expected);
            case_buffer_free(&cases[i].from);
        }
    }
}
