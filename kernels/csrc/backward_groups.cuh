// The backward's division of slices among groups of CTAs. No CUDA in here: a test compiles it for the host.
#pragma once
#include <stdint.h>

namespace turbopair {

constexpr int kBwdConsumers = 2;  // warpgroups of a CTA, which take its pairs of slices in turn
constexpr int kPair = 2;          // slices a consumer works on at once
constexpr int kMaxGroups = 16;

// The first group has `first_share` / 1024 of the pairs, each further one `ratio` percent of its predecessor: the last, short CTAs fill the multiprocessors
// that have nothing left to do. Integers, so that every host divides alike: the groups decide the order of dBias' sum.
struct Groups {
    int count, first_share, ratio;
};

struct GroupedLaunch {
    int64_t sm_count;
    int64_t ctas;  // of one group and query range: heads * key tiles
    int64_t batch;
    int q_tiles, q_ranges, pairs;
    int most_groups;
};

// The division whose CTAs, started in the order of their tickets as multiprocessors become free, end soonest.
Groups choose_groups(const GroupedLaunch &launch);
// Where each group's pairs begin, and behind the last one their number. All but the last begin are even. A group may be empty.
void split_groups(int pairs, const Groups &groups, int (&begin)[kMaxGroups + 1]);
// When the last of the CTAs ends, in query tiles of a slice.
int64_t makespan(const GroupedLaunch &launch, const Groups &groups);

}  // namespace turbopair
