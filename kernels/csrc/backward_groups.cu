#include "backward_groups.cuh"

namespace turbopair {
namespace {

// What a CTA costs before and after its slices (slab, first loads, the key tiles' offset in time), in slices. From timings with three and four chunks.
constexpr int kStartup = 6;
constexpr int kWhole = 1024;  // of `Groups::first_share`

// Multiprocessors by the time at which they become free, soonest first; those of the same time are one entry.
class Multiprocessors {
  public:
    explicit Multiprocessors(int64_t count) : entries_(1) { free_[0] = {0, count}; }

    // Starts CTAs of the same length; returns when the last of them ends.
    int64_t start(int64_t ctas, int64_t length) {
        int64_t end = 0;
        while (ctas > 0) {
            const int64_t count = free_[0].count < ctas ? free_[0].count : ctas;
            end = free_[0].time + length;  // entries are taken soonest first, so the last one ends last
            ctas -= count;
            free_[0].count -= count;
            if (free_[0].count == 0) {
                entries_--;
                for (int x = 0; x < entries_; x++) free_[x] = free_[x + 1];
            }
            insert(end, count);
        }
        return end;
    }

  private:
    struct Entry {
        int64_t time, count;
    };
    static constexpr int kMost = 64;
    Entry free_[kMost + 1];
    int entries_;

    void insert(int64_t time, int64_t count) {
        int i = entries_;
        while (i > 0 && free_[i - 1].time > time) i--;
        if (i > 0 && (free_[i - 1].time == time || entries_ == kMost)) {  // without room: as if they became free a little sooner
            free_[i - 1].count += count;
            return;
        }
        for (int x = entries_; x > i; x--) free_[x] = free_[x - 1];
        free_[i] = {time, count};
        entries_++;
    }
};

}  // namespace

void split_groups(int pairs, const Groups &groups, int (&begin)[kMaxGroups + 1]) {
    constexpr int64_t kUnit = 1000000;  // weight of the second group
    int64_t total = 0, weight = kUnit;
    for (int g = 1; g < groups.count; g++, weight = weight * groups.ratio / 100) total += weight;
    const int64_t rest = int64_t(pairs) * (kWhole - groups.first_share);
    int64_t at = int64_t(pairs) * groups.first_share;  // in 1 / kWhole of a pair
    begin[0] = 0;
    weight = kUnit;
    for (int g = 1; g < groups.count; g++, weight = weight * groups.ratio / 100) {
        const int64_t even = kBwdConsumers * ((at + kBwdConsumers * kWhole / 2) / (kBwdConsumers * kWhole));
        begin[g] = int(even < pairs ? even : pairs);
        at += rest * weight / total;
    }
    begin[groups.count] = pairs;
}

int64_t makespan(const GroupedLaunch &launch, const Groups &groups) {
    int begin[kMaxGroups + 1];
    split_groups(launch.pairs, groups, begin);
    Multiprocessors processors(launch.sm_count);
    int64_t last = 0;
    for (int64_t b = 0; b < launch.batch && b < 2; b++) {  // further ones repeat the second
        for (int g = 0; g < groups.count; g++) {
            const int64_t rounds = (begin[g + 1] - begin[g] + kBwdConsumers - 1) / kBwdConsumers;
            for (int r = 0; r < launch.q_ranges; r++) {
                const int tiles = launch.q_tiles * (r + 1) / launch.q_ranges - launch.q_tiles * r / launch.q_ranges;
                const int64_t end = processors.start(launch.ctas, (rounds * kBwdConsumers * kPair + kStartup) * tiles);
                last = end > last ? end : last;
            }
        }
    }
    return last;
}

Groups choose_groups(const GroupedLaunch &launch) {
    Groups best = {1, kWhole, 100};
    int64_t soonest = makespan(launch, best);
    auto consider = [&](const Groups &groups) {
        const int64_t end = makespan(launch, groups);
        if (end < soonest) soonest = end, best = groups;
    };
    for (int g = 2; g <= kMaxGroups && g <= launch.pairs && g <= launch.most_groups; g++) {
        const int even = kWhole / g, most = kWhole * 9 / 10;
        consider({g, even, 100});
        // Groups that all run at once end with the longest; more than six gain nothing by being unequal.
        if (launch.batch * launch.ctas * launch.q_ranges * g <= launch.sm_count || g > 6) continue;
        for (int step = 1; step < 8; step++) {
            const int first = even + (most - even) * step / 8;
            consider({g, first, 100});
            if (g > 2) consider({g, first, 60}), consider({g, first, 35});
        }
    }
    return best;
}

}  // namespace turbopair
