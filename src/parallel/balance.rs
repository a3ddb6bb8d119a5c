//! The distribution of layers over stages.

use std::ops::Range;

/// Cuts layers of these `costs` into `num_stages` runs of consecutive layers, so that the most
/// expensive run is as cheap as possible. If there are more stages than layers, the last stages are
/// empty.
pub fn balance(costs: &[u64], num_stages: usize) -> Vec<Range<usize>> {
    let num_layers = costs.len();
    let full = num_stages.min(num_layers);
    let mut sums = vec![0_u128; num_layers + 1];
    for (at, cost) in costs.iter().enumerate() {
        sums[at + 1] = sums[at] + u128::from(*cost);
    }
    // best[k][n], for the first n layers in k runs: the largest run, as a tie-break the last run's
    // distance from it, and the start of the last run
    let worst = (u128::MAX, u128::MAX, 0);
    let mut best = vec![vec![worst; num_layers + 1]; full + 1];
    best[0][0] = (0, 0, 0);
    for runs in 1..=full {
        for end in runs..=num_layers {
            for start in runs - 1..end {
                let run = sums[end] - sums[start];
                let largest = best[runs - 1][start].0.max(run);
                best[runs][end] = best[runs][end].min((largest, largest - run, start));
            }
        }
    }
    let mut stages = vec![num_layers..num_layers; num_stages];
    let mut end = num_layers;
    for runs in (1..=full).rev() {
        let start = best[runs][end].2;
        stages[runs - 1] = start..end;
        end = start;
    }
    stages
}

#[cfg(test)]
mod tests {
    use super::balance;

    #[test]
    fn equal_layers_are_shared_equally() {
        assert_eq!(balance(&[3, 3, 3, 3], 2), [0..2, 2..4]);
        assert_eq!(balance(&[2, 3, 3, 3], 4), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(balance(&[1; 6], 4).iter().map(|run| run.len()).max(), Some(2));
        assert_eq!(balance(&[5, 5], 3), [0..1, 1..2, 2..2]);
    }

    #[test]
    fn a_layer_that_costs_much_has_a_stage_of_its_own() {
        assert_eq!(balance(&[1, 9, 1, 1, 1], 2), [0..2, 2..5]);
        assert_eq!(balance(&[1, 9, 1, 1, 1], 3), [0..1, 1..2, 2..5]);
    }

    #[test]
    fn no_other_cut_has_a_cheaper_largest_stage() {
        // all lists of six costs of 0 to 3, in one to four stages
        for code in 0..4_usize.pow(6) {
            let costs: Vec<u64> = (0..6).map(|i| (code / 4_usize.pow(i) % 4) as u64).collect();
            for num_stages in 1..=4 {
                let stages = balance(&costs, num_stages);
                let largest = |cuts: &[usize]| {
                    cuts.windows(2).map(|cut| costs[cut[0]..cut[1]].iter().sum::<u64>()).max()
                };
                let mut found: Vec<usize> = stages.iter().map(|run| run.start).collect();
                found.push(6);
                assert!(found.is_sorted() && found[0] == 0, "{costs:?} {stages:?}");
                let least = cuts(6, num_stages).iter().map(|cuts| largest(cuts)).min().unwrap();
                assert_eq!(largest(&found), least, "{costs:?} {stages:?}");
            }
        }
    }

    /// Returns all ways of cutting `len` layers into `num` runs of at least one.
    fn cuts(len: usize, num: usize) -> Vec<Vec<usize>> {
        if num == 1 {
            return vec![vec![0, len]];
        }
        let before = (num - 1..len).flat_map(|end| cuts(end, num - 1));
        before
            .map(|mut cut| {
                cut.push(len);
                cut
            })
            .collect()
    }
}
