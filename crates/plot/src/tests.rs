use crate::{Bars, Chart, Drawing, Heat, HeatPanel, Series, Stroke};

fn chart(series: Vec<Series>, log: bool) -> Drawing {
    let (title, label) = ("a <title> & \"more\"\u{1b}".to_string(), "scaled down".to_string());
    Chart { title, label, across: "step".into(), up: "accuracy".into(), log, decades: log, series }
        .draw()
}

fn series(points: &[(f64, f64)], stroke: Stroke) -> Series {
    Series {
        name: Some("a rather long name of a mixer, 256".into()),
        place: 3,
        points: points.to_vec(),
        stroke,
    }
}

#[test]
fn any_points_give_two_whole_pictures() {
    let lists: [&[(f64, f64)]; 5] = [
        &[],
        &[(0.0, 0.5)],
        &[(1.0, f64::NAN), (f64::INFINITY, 0.2)],
        &[(5.0, -0.3), (5.0, 1.2)],
        &[(1e15, 0.1), (1.0, 0.9), (64.0, 0.5)],
    ];
    let folder = tempfile::tempdir().unwrap();
    for points in lists {
        for (stroke, log) in [(Stroke::Line, false), (Stroke::Dots, true), (Stroke::Rings, true)] {
            let drawing = chart(vec![series(points, stroke)], log);
            let svg = drawing.svg();
            assert!(
                svg.starts_with("<svg width=\"900\"") && svg.ends_with("</svg>\n"),
                "{points:?}"
            );
            assert!(svg.chars().all(|c| c == '\n' || !c.is_control()), "{points:?}");
            let path = folder.path().join("a.png");
            drawing.write_png(&path).unwrap();
            assert!(std::fs::read(&path).unwrap().ends_with(b"IEND\xaeB`\x82"), "{points:?}");
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no draft is left");
}

#[test]
fn a_picture_without_points_says_so() {
    assert!(chart(vec![], false).svg().contains("nothing to show yet"));
    assert!(
        !chart(vec![series(&[(1.0, 0.5)], Stroke::Dots)], false).svg().contains("nothing to show")
    );
}

#[test]
fn more_names_than_fit_are_counted() {
    let many = (0..20).map(|_| series(&[(1.0, 0.5)], Stroke::Dots)).collect();
    assert!(chart(many, false).svg().contains("and 6 more"));
}

#[test]
fn a_missing_bar_is_a_cross_and_a_zero_is_a_bar() {
    let svg = |ours: Option<f64>| {
        let lines =
            vec![("a".into(), vec![ours], vec![None]), ("b".into(), vec![Some(1.0)], vec![None])];
        let (title, label, up) = ("t".into(), "l".into(), "accuracy".into());
        Bars { title, label, up, columns: vec!["parity".into()], lines }.draw().svg()
    };
    let [zero, none] = [Some(0.0), None].map(svg);
    let count = |svg: &str, mark: &str| svg.matches(mark).count();
    assert_eq!(count(&zero, "<rect"), count(&none, "<rect") + 1);
    assert_eq!(count(&zero, "<polyline") + 2, count(&none, "<polyline"));
}

#[test]
fn a_heat_map_sorts_by_number_averages_and_marks_what_is_missing() {
    let found = [
        (vec!["1024".to_string(), "00_10".into()], 0.25),
        (vec!["1024".to_string(), "00_10".into()], 0.75),
        (vec!["512".to_string(), "10_20".into()], 1.0),
    ];
    let panels = vec![HeatPanel::new("DeltaNet".into(), &found)];
    let heat = Heat {
        title: "t".into(),
        label: "l".into(),
        across: "length".into(),
        up: "depth".into(),
        panels,
    };
    let svg = heat.draw().svg();
    let place =
        |text: &str| svg.find(&format!("\n{text}\n")).unwrap_or_else(|| panic!("no {text}: {svg}"));
    assert!(place("512") < place("1024") && place("00–10") < place("10–20"));
    assert!(svg.contains("\n0.50\n") && svg.contains("\n1.00\n") && svg.contains("\n–\n"));
}

#[test]
fn a_folder_that_can_not_be_written_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().join("a.png");
    let message = chart(vec![], false).write_png(&path).unwrap_err().to_string();
    assert!(message.contains(&path.display().to_string()), "{message}");
}
