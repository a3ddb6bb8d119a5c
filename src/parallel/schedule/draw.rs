//! Drawings of schedules: a table for the terminal, and a picture.

use std::path::Path;

use plotters::prelude::{IntoDrawingArea, RGBColor, Rectangle, SVGBackend, ShapeStyle, Text, WHITE};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{IntoFont, TextStyle};

use super::{Report, Schedule, TimedPass, Work};
use crate::{Error, Result};

/// The width of a unit of time, in pixels.
const UNIT: i32 = 34;
/// The height of a rank, in pixels.
const ROW: i32 = 34;
const LEFT: i32 = 70;
const TOP: i32 = 44;
const BOTTOM: i32 = 44;

impl Schedule {
    /// Returns a table of the schedule `name`: its headline, then a row for each rank with a cell
    /// for each unit of time. A pass is shown by its letter and its micro-batch, after its stage
    /// where ranks have several, in all cells that it takes.
    ///
    /// # Errors
    /// The schedule is too long to draw.
    pub fn table(&self, name: &str, report: &Report) -> Result<String> {
        check_length(report)?;
        let cells: Vec<Vec<String>> = report
            .timeline
            .ranks
            .iter()
            .map(|spans| {
                let mut row = vec![".".to_owned(); report.timeline.length as usize];
                for span in spans {
                    row[span.start as usize..span.end as usize].fill(self.label(span));
                }
                row
            })
            .collect();
        let width = cells.iter().flatten().map(String::len).max().unwrap_or(1);
        let mut text = self.headline(name, report) + "\n";
        for (rank, row) in cells.iter().enumerate() {
            let row: Vec<String> = row.iter().map(|cell| format!("{cell:<width$}")).collect();
            text += format!("rank {rank:<3} {}", row.join(" ")).trim_end();
            text += "\n";
        }
        Ok(text)
    }

    /// Returns one line with the sizes, the bubble and the memory of the schedule `name`.
    pub fn headline(&self, name: &str, report: &Report) -> String {
        let most = report.peak_live.iter().max().copied().unwrap_or_default();
        let (ranks, stages, micro_batches) = (self.ranks.len(), self.num_stages, self.num_micro_batches);
        let plural =
            |number, what: &str, s: &str| format!("{number} {what}{}", if number == 1 { "" } else { s });
        format!(
            "{name}: {} on {}, {}; bubble {:.1} %, at most {most} live micro-batches on a rank",
            plural(stages, "stage", "s"),
            plural(ranks, "rank", "s"),
            plural(micro_batches, "micro-batch", "es"),
            100.0 * report.bubble
        )
    }

    fn label(&self, span: &TimedPass) -> String {
        let action = span.action;
        let stage = if self.num_stages > self.ranks.len() { action.stage.to_string() } else { String::new() };
        format!("{stage}{}{}", action.work.name(), action.micro_batch)
    }

    /// Draws the schedule into the SVG file `path`. Not collective.
    ///
    /// # Errors
    /// The schedule is too long to draw, or the file cannot be written.
    pub fn draw(&self, name: &str, report: &Report, path: &Path) -> Result<()> {
        check_length(report)?;
        let mut svg = String::new();
        self.draw_into(&mut svg, name, report).map_err(|why| Error::failed("drawing the schedule", why))?;
        std::fs::write(path, svg).map_err(|error| Error::input(format!("writing {}", path.display()), error))
    }

    fn draw_into(&self, svg: &mut String, name: &str, report: &Report) -> std::result::Result<(), String> {
        let timeline = &report.timeline;
        let (num_ranks, length) = (timeline.ranks.len() as i32, timeline.length as i32);
        let size = ((LEFT + UNIT * length + 20).max(700) as u32, (TOP + ROW * num_ranks + BOTTOM) as u32);
        let area = SVGBackend::with_string(svg, size).into_drawing_area();
        let fail = |error: &dyn std::fmt::Display| error.to_string();
        area.fill(&WHITE).map_err(|error| fail(&error))?;
        let text = |words: String, at: (i32, i32), pixels: i32, color: RGBColor, horizontal: HPos| {
            let style = TextStyle::from(("sans-serif", pixels).into_font()).color(&color);
            area.draw(&Text::new(words, at, style.pos(Pos::new(horizontal, VPos::Center))))
                .map_err(|error| fail(&error))
        };
        let boxed = |from: (i32, i32), to: (i32, i32), style: ShapeStyle| {
            area.draw(&Rectangle::new([from, to], style)).map_err(|error| fail(&error))
        };
        text(self.headline(name, report), (LEFT, TOP / 2), 15, DARK, HPos::Left)?;
        boxed((LEFT, TOP), (LEFT + UNIT * length, TOP + ROW * num_ranks), IDLE)?;
        for (rank, spans) in timeline.ranks.iter().enumerate() {
            let top = TOP + ROW * rank as i32;
            text(format!("rank {rank}"), (LEFT - 10, top + ROW / 2), 14, DARK, HPos::Right)?;
            let stages = self.stages_of(rank);
            for span in spans {
                let (left, right) = (LEFT + UNIT * span.start as i32, LEFT + UNIT * span.end as i32);
                let place = stages.binary_search(&span.action.stage).unwrap_or_default();
                let shade = u8::try_from(place).unwrap_or(u8::MAX);
                let fill = color(span.action.work, shade);
                boxed((left, top), (right, top + ROW), ShapeStyle::from(&fill).filled())?;
                boxed((left, top), (right, top + ROW), ShapeStyle::from(&WHITE).stroke_width(2))?;
                let middle = ((left + right) / 2, top + ROW / 2);
                let ink = if shade > 1 { DARK } else { WHITE };
                text(span.action.micro_batch.to_string(), middle, 14, ink, HPos::Center)?;
            }
        }
        self.draw_legend(report, (LEFT, TOP + ROW * num_ranks + BOTTOM / 2), &boxed, &text)
    }

    /// Draws the legend of the colours that occur.
    fn draw_legend(
        &self,
        report: &Report,
        at: (i32, i32),
        boxed: &impl Fn((i32, i32), (i32, i32), ShapeStyle) -> std::result::Result<(), String>,
        text: &impl Fn(String, (i32, i32), i32, RGBColor, HPos) -> std::result::Result<(), String>,
    ) -> std::result::Result<(), String> {
        let names = [
            (Work::Forward, "forward"),
            (Work::Backward, "backward"),
            (Work::InputGradient, "input gradient"),
            (Work::WeightGradient, "weight gradient"),
        ];
        let occurs = |work| report.timeline.ranks.iter().flatten().any(|span| span.action.work == work);
        let mut left = at.0;
        for (work, name) in names.into_iter().filter(|(work, _)| occurs(*work)) {
            boxed((left, at.1 - 7), (left + 14, at.1 + 7), ShapeStyle::from(&color(work, 0)).filled())?;
            text(name.to_owned(), (left + 20, at.1), 13, DARK, HPos::Left)?;
            left += 44 + 7 * name.len() as i32;
        }
        if self.num_stages > self.ranks.len() {
            text("a rank's later stages are lighter".to_owned(), (left, at.1), 13, DARK, HPos::Left)?;
        }
        Ok(())
    }
}

/// The size of the largest schedule that is drawn, in cells.
const MOST_CELLS: u64 = 100_000;

fn check_length(report: &Report) -> Result<()> {
    let cells = report.timeline.length.saturating_mul(report.timeline.ranks.len() as u64);
    if cells > MOST_CELLS {
        let why = format!(
            "it would have {cells} cells, and {MOST_CELLS} is the limit; ask for fewer micro-batches"
        );
        return Err(Error::input("drawing the schedule", why));
    }
    Ok(())
}

const DARK: RGBColor = RGBColor(40, 40, 50);
const IDLE: ShapeStyle =
    ShapeStyle { color: plotters::style::RGBAColor(234, 235, 239, 1.0), filled: true, stroke_width: 0 };

/// Returns the colour of a pass: blue for forward, green for backward, green and violet for its
/// halves; lighter for a rank's later stages.
fn color(work: Work, shade: u8) -> RGBColor {
    let (red, green, blue) = match work {
        Work::Forward => (52, 101, 164),
        Work::Backward | Work::InputGradient => (46, 125, 83),
        _ => (125, 82, 150),
    };
    let lighter = |value: u8| value.saturating_add(shade.saturating_mul(45).min(110));
    RGBColor(lighter(red), lighter(green), lighter(blue))
}
